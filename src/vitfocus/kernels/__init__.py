"""The arithmetic of the treatments, written to be read beside the papers' equations."""
