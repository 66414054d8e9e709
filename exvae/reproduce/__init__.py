"""The paper's tables: its numbers (`paper`), the runs that reproduce them (`cells`), and the pages made from them."""
