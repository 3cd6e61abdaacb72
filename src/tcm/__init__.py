"""Truncated Consistency Models: from a diffusion model to one-step generation."""
