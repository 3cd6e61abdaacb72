"""The playground: one page that holds a model and generates with it in the browser."""
