"""What a run was made with: digests of its code, data and tokenizer, recorded at every start, compared at a resume."""
