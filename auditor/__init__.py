"""The referee: a process apart from engine and trainer that compares their log-probabilities bit by bit.

`auditor.client`, `auditor.records` and `auditor.facts` are the door for everyone else; they need grpcio, protobuf and
numpy only, and `auditor/client_wheel` installs them alone.
"""

import os

# Read by gRPC as it is imported. What it does itself in a forked child kills some (8 of 1,563, while a client was
# connecting), and breaks their parents' connections; `auditor.forks` says what is done instead.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
