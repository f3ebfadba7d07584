"""Settings: what a user can choose, validated once, before anything runs."""
