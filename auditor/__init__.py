"""The referee: a process apart from engine and trainer that compares their log-probabilities bit by bit.

`auditor.client` and `auditor.records` are the door for everyone else; they need grpcio, protobuf and numpy only.
"""
