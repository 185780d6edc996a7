"""The referee: a process apart from engine and trainer that compares their log-probabilities bit by bit.

`auditor.client`, `auditor.records` and `auditor.facts` are the door for everyone else; they need grpcio, protobuf and
numpy only, and `auditor/client_wheel` installs them alone.
"""
