"""The Attention Diversification Loss."""
