"""Triton kernels of MaxSim and term weights; `ranker.interactions` computes the same with torch's operations."""
