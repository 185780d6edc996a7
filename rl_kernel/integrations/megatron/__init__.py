"""Megatron-core's real GPTModel with every op on the path to a logprob, and back, replaced by a strict one.

`model.StrictModel` builds it, `native.NativeModel` is the stock control group behind the same interface. `spec` says
what is replaced, `weights` maps Hugging Face tensors to Megatron's and back, `proof` refuses whatever is not ours.
"""
