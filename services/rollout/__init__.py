"""The side that samples: vLLM in `engine`, Ray and the audit around it in `actor`."""
