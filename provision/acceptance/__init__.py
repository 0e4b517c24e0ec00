"""How nodes come to be trusted with work: new, configured, verified, burned-in, admitted, or quarantined."""
