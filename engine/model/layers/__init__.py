"""The layers of models: attention of every kind, layers with states, experts, linear layers."""
