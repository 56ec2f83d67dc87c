"""What every task of a schedule takes on a machine, and what it shares with others."""
