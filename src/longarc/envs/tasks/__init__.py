"""Task families: each is one small file that generates tasks, opens their worlds and grades what happened."""
