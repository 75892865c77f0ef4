"""Where weights come from: sources, and readers that turn files into a spec and named tensors."""
