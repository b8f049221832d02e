"""Templates: from a YAML file to checked values, and back."""
