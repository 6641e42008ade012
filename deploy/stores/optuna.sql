-- Run once, on the empty server: Optuna and MLflow keep their schema's version in a table of the same name, so each has a database.
CREATE DATABASE optuna;
