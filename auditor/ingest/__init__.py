"""The gRPC side: limits, tokens, receipts."""
