from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier

features, labels = make_classification(n_samples=200, random_state=0)
model = RandomForestClassifier(n_estimators=10, n_jobs=2, random_state=0).fit(features, labels)
assert model.score(features, labels) > 0.9
print("ok sklearn_fit")
