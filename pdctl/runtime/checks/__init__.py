"""What validation finds out, one file per question; every host is asked through its survey."""
