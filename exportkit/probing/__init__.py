"""Questions put to the model by running it: batch axes, lengths, values for missing inputs."""
