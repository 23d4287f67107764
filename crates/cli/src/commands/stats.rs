//! `ubtrfs stats DIR|IMAGE`: prints the counters of a mounted filesystem, or how full the trees of an image are.
//!
//! I1. A mount returns its counters as Prometheus text; the other formats are made from this text.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use ubtrfs_control::{Request, Response, filesystem};
use ubtrfs_format::print::json_lines;
use ubtrfs_transaction::{Metric, prometheus_text};

use super::inspect::{TreeStats, tree_stats};
use super::offline::{ImageOptions, ImageUse};
use super::place::{CommandTarget, with_channel};
use crate::common::{Shown, format_size, print_out};

/// Show the counters of a mounted filesystem, or how full the trees of an image are
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A mount point, an image file or a block device
    #[arg(value_name = "DIR|IMAGE")]
    target: PathBuf,
    /// Print as JSON
    #[arg(long, conflicts_with = "prometheus")]
    json: bool,
    /// Print in the text format of Prometheus
    #[arg(long)]
    prometheus: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (text, trees) = match CommandTarget::Mounted(args.target.clone()).or_image() {
        CommandTarget::Mounted(path) => (mount_stats(&path)?, None),
        CommandTarget::Image(at) => {
            let trees = tree_stats(&at.image)?;
            (prometheus_text(&metrics_of(&trees)), Some(trees))
        }
    };
    let out = if args.prometheus {
        text
    } else if args.json {
        format!("{}\n", json_lines(&to_json(&parse(&text))))
    } else {
        trees.map_or_else(|| mount_text(&parse(&text)), |trees| image_text(&args.target, &trees))
    };
    print_out(&out)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the counters of a mount as Prometheus text.
pub(crate) fn mount_stats(path: &Path) -> anyhow::Result<String> {
    let target = CommandTarget::Mounted(path.to_owned());
    with_channel(&target, &ImageOptions::default(), ImageUse::Read, |channel| {
        let stats = channel.call(Request::Filesystem(filesystem::Request::Stats), &[]);
        match stats.with_context(|| format!("cannot read the counters of {target}"))? {
            Response::Filesystem(filesystem::Response::Stats(text)) => Ok(text),
            _ => bail!("{target}: unexpected answer of the server; unmount and mount with this ubtrfs"),
        }
    })
}

fn metrics_of(trees: &[TreeStats]) -> Vec<Metric> {
    let mut out = Vec::new();
    for tree in trees {
        let mut push = |name, help, value: f64| {
            out.push(Metric::gauge(name, help, value).label("tree", tree.title).label("id", &tree.id.to_string()));
        };
        push("tree_levels", "Levels of the tree", tree.levels as f64);
        push("tree_nodes", "Blocks of the tree, leaves included", tree.nodes as f64);
        push("tree_leaves", "Leaves of the tree", tree.leaves as f64);
        push("tree_sparse_leaves", "Leaves that are less than half full", tree.sparse_leaves as f64);
        push("tree_items", "Items in the tree", tree.items as f64);
        push("tree_leaf_fill", "Mean fill of the leaves, from 0 to 1", tree.fill());
        push("tree_dir_index_leaves", "Leaves with directory index items", tree.dir_index_leaves as f64);
        push("tree_dir_index_items", "Directory index items", tree.dir_index_items as f64);
        push("tree_damaged_blocks", "Blocks that could not be read or are wrong", tree.damaged as f64);
    }
    out
}

fn image_text(image: &Path, trees: &[TreeStats]) -> String {
    let mut text = format!("{}\n", image.shown());
    text += &row(&["tree", "id", "levels", "nodes", "leaves", "items", "fill", "sparse", "damaged"].map(str::to_owned));
    for tree in trees {
        let numbers = [tree.levels, tree.nodes, tree.leaves, tree.items].map(|number| number.to_string());
        let fill = format!("{:.1}%", tree.fill() * 100.0);
        let mut cells = vec![tree.title.to_owned(), tree.id.to_string()];
        cells.extend(numbers);
        cells.extend([fill, tree.sparse_leaves.to_string(), tree.damaged.to_string()]);
        text += &row(&cells);
    }
    text
}

fn row(cells: &[String]) -> String {
    let mut line = format!("{:18}", cells.first().map_or("", String::as_str));
    for cell in &cells[1..] {
        line += &format!(" {cell:>10}");
    }
    line + "\n"
}

/// A line of the Prometheus text: name, labels, value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) value: f64,
}

/// Parses the text that [`prometheus_text`] makes. Lines of any other form are ignored.
pub(super) fn parse(text: &str) -> Vec<Sample> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Sample> {
    let (head, value) = line.rsplit_once(' ')?;
    let (name, labels) = head.split_once('{').unwrap_or((head, ""));
    let mut found = BTreeMap::new();
    for pair in labels.trim_end_matches('}').split("\",").filter(|pair| !pair.is_empty()) {
        let (label, value) = pair.split_once("=\"")?;
        found.insert(label.to_owned(), value.trim_end_matches('"').to_owned());
    }
    // The server may be another user's.
    let value = value.parse().ok().filter(|value: &f64| value.is_finite())?;
    Some(Sample { name: name.to_owned(), labels: found, value })
}

/// Makes JSON: numbers by name, and for each label a list (`trees`, `phases` and so on) with an object for each value
/// of the label.
fn to_json(samples: &[Sample]) -> Value {
    let mut out = serde_json::Map::new();
    for sample in samples {
        let name = short(&sample.name);
        // Labels except `le` distinguish the objects of one list; `le` is the upper bound of a histogram bucket.
        let labels: BTreeMap<&String, &String> = sample.labels.iter().filter(|(label, _)| *label != "le").collect();
        let Some(list) = ["tree", "phase", "file"]
            .into_iter()
            .find(|label| sample.labels.contains_key(*label))
            .or_else(|| labels.keys().next().map(|label| label.as_str()))
        else {
            out.insert(name.to_owned(), json!(sample.value));
            continue;
        };
        // Within the list, names of numbers need not repeat the list's name, so remove this prefix.
        let field = name.strip_prefix(list).map_or(name, |rest| rest.trim_start_matches('_'));
        let entry = out.entry(format!("{list}s")).or_insert_with(|| json!([]));
        let Some(objects) = entry.as_array_mut() else { continue };
        let is_of = |object: &Value| labels.iter().all(|(label, value)| object[label.as_str()] == json!(value));
        let at = objects.iter().position(is_of).unwrap_or_else(|| {
            objects.push(json!(labels));
            objects.len() - 1
        });
        match sample.labels.get("le") {
            Some(edge) => {
                let bucket =
                    json!({ "le": edge.parse::<f64>().ok().filter(|edge| edge.is_finite()), "count": sample.value });
                let buckets = &mut objects[at]["buckets"];
                match buckets.as_array_mut() {
                    Some(buckets) => buckets.push(bucket),
                    None => *buckets = json!([bucket]),
                }
            }
            None => objects[at][field] = json!(sample.value),
        }
    }
    Value::Object(out)
}

/// Makes text for people: a table for each label, a line for each number without labels, and a table of the phases.
fn mount_text(samples: &[Sample]) -> String {
    let (phases, others): (Vec<&Sample>, Vec<&Sample>) =
        samples.iter().partition(|sample| sample.name.starts_with("ubtrfs_phase_seconds"));
    let mut text = String::new();
    for label in ["file", "tree", "state", "kind", "opcode"] {
        text += &table(label, &others);
    }
    for sample in others.iter().filter(|sample| sample.labels.is_empty()) {
        text += &format!("{:34} {:>14}\n", short(&sample.name), shown(sample));
    }
    text + "\n" + &phase_table(&phases)
}

pub(super) fn short(name: &str) -> &str {
    let name = name.strip_prefix("ubtrfs_").unwrap_or(name);
    name.strip_suffix("_total").unwrap_or(name)
}

fn shown(sample: &Sample) -> String {
    let name = short(&sample.name);
    match sample.value {
        value if name.ends_with("_bytes") => format_size(value as u64),
        value if name.ends_with("_seconds") || name.ends_with("_seconds_max") => time(value),
        value if name.ends_with("_fill") || name.ends_with("_rate") => format!("{:.1}%", value * 100.0),
        value => format!("{value}"),
    }
}

/// Makes a table: one line for each value of a label, one column for each metric that has the label.
fn table(label: &str, samples: &[&Sample]) -> String {
    let of_label: Vec<_> = samples.iter().filter(|sample| sample.labels.contains_key(label)).collect();
    let (mut lines, mut names): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
    for sample in &of_label {
        if !lines.contains(&sample.labels[label].as_str()) {
            lines.push(&sample.labels[label]);
        }
        if !names.contains(&sample.name.as_str()) {
            names.push(&sample.name);
        }
    }
    if names.is_empty() {
        return String::new();
    }
    // Leave out the columns' common prefix, which repeats the table's label.
    let head = |name: &str| short(name).split_once('_').map_or(name, |(_, rest)| rest).to_owned();
    let width = |name: &str| head(name).len().max(10);
    let mut text = format!("{label:14}");
    names.iter().for_each(|name| text += &format!("  {:>1$}", head(name), width(name)));
    for line in lines {
        text += &format!("\n{line:14}");
        for name in &names {
            let found = of_label.iter().find(|sample| sample.name == *name && sample.labels[label] == line);
            text += &format!("  {:>1$}", found.map_or("-".to_owned(), |sample| shown(sample)), width(name));
        }
    }
    text + "\n\n"
}

fn phase_table(samples: &[&Sample]) -> String {
    let mut phases: Vec<&str> = Vec::new();
    for sample in samples {
        if let Some(phase) = sample.labels.get("phase")
            && !phases.contains(&phase.as_str())
        {
            phases.push(phase);
        }
    }
    let mut text =
        format!("{:14} {:>9} {:>11} {:>11} {:>11} {:>11}\n", "phase", "count", "total", "mean", "99% up to", "max");
    for phase in phases {
        let of = |name: &str| {
            let of_phase = |sample: &&&Sample| sample.labels.get("phase").is_some_and(|own| own == phase);
            samples.iter().filter(of_phase).filter(|sample| sample.name == name).copied().collect::<Vec<_>>()
        };
        let one = |name: &str| of(name).first().map_or(0.0, |sample| sample.value);
        let (count, sum) = (one("ubtrfs_phase_seconds_count"), one("ubtrfs_phase_seconds_sum"));
        let buckets = of("ubtrfs_phase_seconds_bucket");
        let most = buckets.iter().find(|bucket| bucket.value >= count * 0.99 && count > 0.0);
        let most = most.and_then(|bucket| bucket.labels.get("le")).map_or("-", String::as_str);
        let most = most
            .parse::<f64>()
            .map_or("-".to_owned(), |edge| if edge.is_finite() { time(edge) } else { "more".to_owned() });
        let (mean, max) = (time(sum / count.max(1.0)), time(one("ubtrfs_phase_seconds_max")));
        text += &format!("{phase:14} {count:>9} {:>11} {mean:>11} {most:>11} {max:>11}\n", time(sum));
    }
    text
}

pub(super) fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 1.0 => format!("{seconds:.2} s"),
        seconds if seconds >= 1e-3 => format!("{:.2} ms", seconds * 1e3),
        seconds => format!("{:.1} us", seconds * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_read_back() {
        let metrics = [
            Metric::counter("a_total", "help", 3.0).label("tree", "sub volume").label("id", "5"),
            Metric::gauge("b_bytes", "help", 0.25),
            Metric::histogram("phase_seconds", "_bucket", "help", 2.0).label("phase", "commit").label("le", "+Inf"),
        ];
        let samples = parse(&prometheus_text(&metrics));
        assert_eq!(samples.len(), 3);
        assert_eq!(samples[0].labels["tree"], "sub volume");
        assert_eq!((samples[0].name.as_str(), samples[0].value), ("ubtrfs_a_total", 3.0));
        assert_eq!(samples[2].labels["le"], "+Inf");
        let text = mount_text(&samples);
        assert!(text.contains("sub volume") && text.contains("commit"), "{text}");
        let value = to_json(&samples);
        assert_eq!(value["b_bytes"], json!(0.25));
        assert_eq!(value["trees"], json!([{ "tree": "sub volume", "id": "5", "a": 3.0 }]));
        assert_eq!(value["phases"], json!([{ "phase": "commit", "buckets": [{ "le": null, "count": 2.0 }] }]));
    }
}
