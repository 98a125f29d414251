"""A laboratory of workers behind links of a chosen rate and delay, on one Linux machine.

    with lab.Network(workers=4, rate=100e6, delay_s=0.025) as net:
        processes = [net.popen(i, [sys.executable, "worker.py", net.coordinator, str(i)]) for i in range(4)]

Every worker has a network namespace of its own, and nothing in it reaches the machine's own interfaces. What runs there is
real: processes, sockets, the kernel's TCP. The links are emulated.
"""

from .network import Network as Network
from .requirements import available as available
