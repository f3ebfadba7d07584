"""One file per stage of the arc, and the launchers that wire workers together for it."""
