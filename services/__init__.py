"""The RL job: a rollout actor (vLLM), a trainer actor (Megatron-core), the loop between them, and their records."""
