"""Programs that measure: each prints ratios or residuals of figures from one run."""
