"""What is on disk: manifest, records, file names, the graphs' interface. Export and engines import it too."""
