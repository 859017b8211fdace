"""What `validate` and `doctor` find out, one file per question; hosts answer by their survey."""
