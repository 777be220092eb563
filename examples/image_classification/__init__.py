"""A ResNet on small images under Subnetwork Data Parallelism."""
