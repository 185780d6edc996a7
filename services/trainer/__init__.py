"""The side that learns: Megatron-core in `engine`, Ray and the audit around it in `actor`."""
