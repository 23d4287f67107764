//! A measured value with its name, as in Prometheus, and the text that carries such values between programs.

use std::fmt::Write;

/// One value.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// Name without prefix and suffix.
    pub name: &'static str,
    /// `_bucket`, `_sum` or `_count` of a histogram, else empty.
    pub suffix: &'static str,
    /// Description in one line.
    pub help: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Labels that distinguish values of one name.
    pub labels: Vec<(&'static str, String)>,
    /// The value; times in seconds, sizes in bytes.
    pub value: f64,
}

impl Metric {
    /// Makes a metric whose value only grows.
    pub fn counter(name: &'static str, help: &'static str, value: f64) -> Self {
        Self { name, suffix: "", help, kind: "counter", labels: Vec::new(), value }
    }

    /// Makes a metric whose value can grow and fall.
    pub fn gauge(name: &'static str, help: &'static str, value: f64) -> Self {
        Self { kind: "gauge", ..Self::counter(name, help, value) }
    }

    /// Makes a metric that is a part of a histogram.
    pub fn histogram(name: &'static str, suffix: &'static str, help: &'static str, value: f64) -> Self {
        Self { kind: "histogram", suffix, ..Self::counter(name, help, value) }
    }

    /// Adds a label.
    #[must_use]
    pub fn label(mut self, name: &'static str, value: &str) -> Self {
        self.labels.push((name, value.to_owned()));
        self
    }

    /// The name with prefix and suffix.
    pub fn full_name(&self) -> String {
        format!("{PREFIX}{}{}", self.name, self.suffix)
    }
}

/// Formats metrics as text for Prometheus. Metrics of one name stand together, below the help and type of that name.
pub fn prometheus_text(metrics: &[Metric]) -> String {
    let mut text = String::new();
    let mut names: Vec<&str> = Vec::new();
    for metric in metrics {
        if !names.contains(&metric.name) {
            names.push(metric.name);
        }
    }
    for name in names {
        let of_name = || metrics.iter().filter(|metric| metric.name == name);
        if let Some(first) = of_name().next() {
            let _ = writeln!(text, "# HELP {PREFIX}{name} {}", first.help);
            let _ = writeln!(text, "# TYPE {PREFIX}{name} {}", first.kind);
        }
        for metric in of_name() {
            let labels: Vec<String> =
                metric.labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let _ = writeln!(text, "{}{labels} {}", metric.full_name(), metric.value);
        }
    }
    text
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

const PREFIX: &str = "ubtrfs_";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_has_one_head() {
        let metrics = [
            Metric::counter("a_total", "help a", 1.0).label("x", "q\"q"),
            Metric::gauge("b", "help b", 0.5),
            Metric::counter("a_total", "help a", 2.0).label("x", "y"),
        ];
        let expected = "# HELP ubtrfs_a_total help a\n# TYPE ubtrfs_a_total counter\nubtrfs_a_total{x=\"q\\\"q\"} 1\n\
                        ubtrfs_a_total{x=\"y\"} 2\n# HELP ubtrfs_b help b\n# TYPE ubtrfs_b gauge\nubtrfs_b 0.5\n";
        assert_eq!(prometheus_text(&metrics), expected);
    }
}
