"""Plans inside the trainers of other libraries."""
