"""What is on disk: the manifest and other records, file names, and the graphs' interface. Export and engines import it too."""
