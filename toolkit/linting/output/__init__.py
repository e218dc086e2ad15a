"""The findings as text, as the contract's JSON, as SARIF and as GitHub annotations."""
