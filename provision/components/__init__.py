"""One folder a component: settings.py, exports.py, deploy.py, checks.py, templates/."""
