"""One contract class per port; a back-end brings a fixture and inherits."""
