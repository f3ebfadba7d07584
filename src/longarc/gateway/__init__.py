"""Chat in, token ids to the engine, exact training segments out: one core and its doors. No torch."""
