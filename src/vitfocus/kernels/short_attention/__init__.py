"""Attention among few tokens, with its gradients, in one kernel each."""
