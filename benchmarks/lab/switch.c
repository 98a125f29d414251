/* A switch for links with latency, for kernels without netem: one tun device in each namespace, all read by this process.

       switch DEVICE NAMESPACE_PATH...

   Worker i has the IPv4 address whose last byte is i + 1. A packet waits for its turn on the sender's link (rate), then for
   the delay, half of each link's, then for its turn on the receiver's link (rate). Commands on standard input: "shape WORKER
   BITS_PER_SECOND DELAY_NANOSECONDS" (rate 0: unlimited) and "link WORKER 0|1". Each is answered by "ok"; end of input ends the
   switch. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MOST 64
#define HEADER sizeof(struct virtio_net_hdr)

typedef struct packet {
    struct packet *next;
    int64_t due;  /* when it leaves the queue it is in */
    int64_t bits; /* on an Ethernet, after segmentation */
    int to, length;
    char data[];
} packet;

typedef struct {
    packet *head, **tail;
    int64_t queued; /* bits */
} queue;

static int count, fds[MOST], up[MOST];
static queue out[MOST][MOST], in[MOST]; /* by the receiver too: packets to the near do not wait for those to the far */
static int64_t out_free[MOST], in_free[MOST]; /* when the link will have sent what it has accepted */
static int64_t rate[MOST], delay_ns[MOST];

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void push(queue *q, packet *p) {
    p->next = NULL;
    *q->tail = p;
    q->tail = &p->next;
    q->queued += p->bits;
}

static packet *pop(queue *q) {
    packet *p = q->head;
    q->head = p->next;
    if (!q->head) q->tail = &q->head;
    q->queued -= p->bits;
    return p;
}

/* A receiver's link holds 100 ms of the rate, as tbf is given, and two round trips; what comes beyond that is lost. A sender's
   holds everything: a kernel holds its own programs back before its own interface loses their packets, which a tun device
   does not. */
static int full(packet *p) {
    queue *q = &in[p->to];
    int64_t r = rate[p->to];
    return r && q->head && q->queued + p->bits > r / 10 + (int64_t)(4e-9 * delay_ns[p->to] * r);
}

static int64_t serialised(packet *p, int link) { return rate[link] ? (int64_t)(p->bits * 1e9 / rate[link]) : 0; }

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

/* The kernel hands over up to 64 KiB as one packet and segments it "in hardware": count the headers of every segment. */
static int64_t ethernet_bits(const char *data, int length) {
    const struct virtio_net_hdr *h = (const void *)data;
    int payload = length - HEADER, segments = 1, headers = 40;
    if (h->gso_type != VIRTIO_NET_HDR_GSO_NONE && h->gso_size) {
        headers = h->hdr_len ? h->hdr_len : 40;
        segments = (payload - headers + h->gso_size - 1) / h->gso_size;
    }
    return 8LL * (payload + (segments - 1) * headers + 14 * segments);
}

static void take(int from) {
    static char buffer[HEADER + 65536];
    for (int budget = 32; budget--;) {
        int length = read(fds[from], buffer, sizeof buffer);
        if (length < (int)HEADER + 20) return;
        const unsigned char *ip = (const unsigned char *)buffer + HEADER;
        int to = ip[19] - 1;
        if (ip[0] >> 4 != 4 || to < 0 || to >= count || to == from || !up[from] || !up[to]) continue;
        packet *p = malloc(sizeof *p + length);
        if (!p) abort();
        memcpy(p->data, buffer, length);
        p->to = to, p->length = length, p->bits = ethernet_bits(buffer, length);
        out_free[from] = later(now(), out_free[from]) + serialised(p, from);
        p->due = out_free[from] + (delay_ns[from] + delay_ns[to]) / 2;
        push(&out[from][to], p);
    }
}

/* Moves what is due; returns when the next packet will be. An idle receiver's link passes a packet on at once: it took its
   time on the sender's link, and a router that cuts through does not add it again. */
static int64_t forward(void) {
    int64_t next = INT64_MAX, t = now();
    for (int i = 0; i < count * count; i++) {
        int from = i / count, to = i % count;
        queue *q = &out[from][to];
        while (q->head && q->head->due <= t) {
            packet *p = pop(q);
            if (!up[from] || !up[to] || full(p)) { free(p); continue; }
            in_free[to] = later(p->due, in_free[to] + serialised(p, to));
            p->due = in_free[to];
            push(&in[to], p);
        }
        if (q->head && q->head->due < next) next = q->head->due;
    }
    for (int i = 0; i < count; i++) {
        while (in[i].head && in[i].head->due <= t) {
            packet *p = pop(&in[i]);
            if (up[i] && write(fds[i], p->data, p->length) < 0 && errno != EIO && errno != EINVAL) perror("write");
            free(p);
        }
        if (in[i].head && in[i].head->due < next) next = in[i].head->due;
    }
    return next;
}

static int open_in(const char *space, const char *device) {
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    int ns = open(space, O_RDONLY | O_CLOEXEC);
    if (ns < 0 || setns(ns, CLONE_NEWNET)) { perror(space); exit(1); }
    close(ns);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) || ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) {
        perror("/dev/net/tun");
        exit(1);
    }
    return fd;
}

static int obey(void) {
    char line[128];
    int worker, state;
    long long bits, ns;
    if (!fgets(line, sizeof line, stdin)) return 0;
    if (sscanf(line, "shape %d %lld %lld", &worker, &bits, &ns) == 3 && worker >= 0 && worker < count) {
        rate[worker] = bits, delay_ns[worker] = ns;
        out_free[worker] = in_free[worker] = 0;
    } else if (sscanf(line, "link %d %d", &worker, &state) == 2 && worker >= 0 && worker < count)
        up[worker] = state;
    else
        return fprintf(stderr, "not a command: %s", line), 0;
    return puts("ok") >= 0;
}

int main(int argc, char **argv) {
    struct pollfd polled[MOST + 1];
    count = argc - 2;
    if (count < 1 || count > MOST) return fprintf(stderr, "1 to %d namespaces\n", MOST), 1;
    prctl(PR_SET_TIMERSLACK, 1000);
    /* Packets must not wait for the programs whose packets they are. */
    struct sched_param priority = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_RR, &priority);
    setvbuf(stdin, NULL, _IONBF, 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 0; i < count; i++) {
        fds[i] = open_in(argv[i + 2], argv[1]);
        for (int j = 0; j < count; j++) out[i][j].tail = &out[i][j].head;
        in[i].tail = &in[i].head, up[i] = 1;
        polled[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    }
    polled[count] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
    puts("ok");
    for (;;) {
        int64_t next = forward(), wait = next == INT64_MAX ? 1000000000 : later(0, next - now());
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        if (ppoll(polled, count + 1, &timeout, NULL) < 0 && errno != EINTR) return perror("ppoll"), 1;
        for (int i = 0; i < count; i++)
            if (polled[i].revents & POLLIN) take(i);
        if (polled[count].revents && !obey()) return 0;
    }
}
