"""Models with an example run: the three models of ``exportkit demo``, and local transformers checkpoints."""
