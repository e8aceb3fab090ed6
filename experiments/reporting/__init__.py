"""Reading run folders, and what is made of them: tables, figures, pages."""
