"""The experiments of PagedAttention (Kwon et al., SOSP 2023) on quire's own engine."""
