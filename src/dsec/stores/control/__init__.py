"""The control database: keys, projects, calls that were answered, and how far readers of the journal are. SQLite or PostgreSQL, by one URL."""
