"""An S3 server with one bucket: ``python -m benchmarks.world.bucket ADDRESS PORT``. It says when it is there.

A line on standard input names a folder, to which it copies what the bucket holds.
"""

import pathlib
import sys
import threading
import urllib.request
from typing import Any

BUCKET = "bucket"


def options(endpoint: str) -> dict[str, Any]:
    """Returns what ``obstore.store.from_url`` needs for the server."""
    return {
        "endpoint": endpoint,
        "access_key_id": "key",
        "secret_access_key": "secret",
        "region": "us-east-1",
        # A request that hangs while the store is cut off is given up, and asked again over a new connection.
        "client_options": {"allow_http": True, "timeout": "5s"},
    }


def main(address: str, port: int) -> None:
    import boto3
    import waitress
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    # moto's own server ends the connection after each answer, and a new one costs a round trip. S3 keeps them.
    application = DomainDispatcherApplication(create_backend_app)
    server = waitress.create_server(application, host=address, port=port, threads=16)
    threading.Thread(target=server.run, daemon=True).start()
    endpoint = f"http://{address}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).read()
    print("ready", flush=True)
    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret"
    )
    for line in sys.stdin:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for entry in page.get("Contents", ()):
                path = pathlib.Path(line.strip()) / entry["Key"]
                path.parent.mkdir(parents=True, exist_ok=True)
                client.download_file(BUCKET, entry["Key"], str(path))
        print("copied", flush=True)
    server.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
