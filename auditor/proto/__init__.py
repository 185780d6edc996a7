"""The wire: `audit.proto` and the stubs made from it by `python -m auditor.proto.generate`."""
