"""The paper's tables: its numbers (`paper`), the runs that reproduce them (`cells`), and pages with the results."""
