"""Programs that own their agent loop: one file each says how it is started and pointed at the gateway."""
