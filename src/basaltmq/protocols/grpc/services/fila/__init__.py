"""The services fila.v1.FilaService and fila.v1.FilaAdmin."""
