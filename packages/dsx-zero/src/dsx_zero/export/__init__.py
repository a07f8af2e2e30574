"""Weights for somebody else: `buckets` of whole tensors for a generator, `shards` and `changes` for transfers that do
not gather. `contents` says which tensors these are and where this rank's elements belong; `adapters` knows LoRA.
"""
