//! `ubtrfs top DIR`: shows the work of a mount, again every second.
//!
//! Rates and mean times are of the last interval: they come from the differences of the counters that `stats` shows.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Gauge, Paragraph, Row, Table};
use ubtrfs_control::{Request, Response, balance, replace, scrub};

use super::offline::{ImageOptions, ImageUse};
use super::place::{CommandTarget, with_channel};
use super::stats::{Sample, mount_stats, parse, short, time};
use crate::common::{Shown, format_size};
use crate::interrupt;

/// Show what a mounted filesystem does, again every second; q ends
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A mount point
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Seconds between two looks, at least 0.1
    #[arg(short = 'd', long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_interval)]
    delay: f64,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.ok_or_else(|| format!("'{text}' is no number of seconds from 0.1 to 3600"))
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("top needs a terminal; for programs there is: ubtrfs stats --json {}", args.dir.shown());
    }
    // The first look fails before the screen is taken.
    let mut before = Reading::at(args)?;
    interrupt::set_restore(Some(ratatui::restore));
    let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
    let done = (|| {
        loop {
            let now = Reading::at(args)?;
            let view = View::of(&before, &now, args.dir.shown());
            terminal.draw(|frame| view.draw(frame)).context("cannot draw on the terminal")?;
            if is_ended_within(Duration::from_secs_f64(args.delay))? {
                return Ok(ExitCode::SUCCESS);
            }
            before = now;
        }
    })();
    ratatui::restore();
    interrupt::set_restore(None);
    done
}

/// Waits for this long, or until the user ends the program.
fn is_ended_within(delay: Duration) -> anyhow::Result<bool> {
    let end = Instant::now() + delay;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if !event::poll(left).context("cannot read from the terminal")? {
            return Ok(false);
        }
        if let Event::Key(key) = event::read().context("cannot read from the terminal")?
            && key.kind == KeyEventKind::Press
        {
            let is_interrupt = key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
            if is_interrupt || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                return Ok(true);
            }
        }
    }
}

/// The counters of a mount and its running work, at one time.
struct Reading {
    at: Instant,
    samples: Vec<Sample>,
    jobs: Vec<String>,
}

impl Reading {
    fn at(args: &Args) -> anyhow::Result<Self> {
        let text = mount_stats(&args.dir)?;
        Ok(Self { at: Instant::now(), samples: parse(&text), jobs: jobs(&CommandTarget::Mounted(args.dir.clone())) })
    }

    /// The value of a counter without labels.
    fn value(&self, name: &str) -> f64 {
        let found = self.samples.iter().find(|sample| sample.labels.is_empty() && short(&sample.name) == name);
        found.map_or(0.0, |sample| sample.value)
    }

    /// The values of a counter by a label.
    fn by_label(&self, name: &str, label: &str) -> BTreeMap<&str, f64> {
        let of_name = self.samples.iter().filter(|sample| short(&sample.name) == name);
        of_name.filter_map(|sample| Some((sample.labels.get(label)?.as_str(), sample.value))).collect()
    }
}

/// The running work of the filesystem, of which only its administrators may know.
fn jobs(target: &CommandTarget) -> Vec<String> {
    let asked = with_channel(target, &ImageOptions::default(), ImageUse::Read, |channel| {
        let mut jobs = Vec::new();
        if let Ok(Response::Balance(balance::Response::Status(Some(status)))) =
            channel.call(Request::Balance(balance::Request::Status), &[])
        {
            jobs.push(format!("balance: {}", status.state));
        }
        if let Ok(Response::Scrub(scrub::Response::Status(devices))) =
            channel.call(Request::Scrub(scrub::Request::Status), &[])
        {
            jobs.extend(devices.iter().map(|device| {
                let bytes = device.counts.data_bytes_scrubbed.saturating_add(device.counts.tree_bytes_scrubbed);
                format!("scrub of device {}: {} read", device.devid, format_size(bytes))
            }));
        }
        if let Ok(Response::Replace(replace::Response::Running(_))) =
            channel.call(Request::Replace(replace::Request::Status), &[])
        {
            jobs.push("a device is being replaced".to_owned());
        }
        Ok(jobs)
    });
    asked.unwrap_or_default()
}

/// The content of the screen.
#[derive(Debug)]
struct View {
    dir: String,
    /// Name, share from 0 to 1, and the text in the bar.
    bars: Vec<(String, f64, String)>,
    lines: Vec<String>,
    /// Requests by kind: name, number per second, mean time and longest time.
    requests: Vec<[String; 4]>,
    jobs: Vec<String>,
}

impl View {
    fn of(before: &Reading, now: &Reading, dir: String) -> Self {
        let seconds = now.at.duration_since(before.at).as_secs_f64().max(1e-3);
        let rate = |name: &str| (now.value(name) - before.value(name)).max(0.0) / seconds;
        let size = |bytes: f64| format_size(bytes as u64);
        let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 0.0 };

        let budget = now.value("memory_budget_bytes");
        let dirty = now.value("dirty_bytes");
        let mut bars = vec![(
            "dirty data".to_owned(),
            share(dirty, budget),
            format!("{} of {} for everything", size(dirty), size(budget)),
        )];
        let (totals, used) = (now.by_label("space_total_bytes", "kind"), now.by_label("space_used_bytes", "kind"));
        for (kind, total) in totals {
            let used = used.get(kind).copied().unwrap_or_default();
            bars.push((kind.to_owned(), share(used, total), format!("{} of {}", size(used), size(total))));
        }

        let (hits, misses) = (rate("node_cache_hits"), rate("node_cache_misses"));
        let commits = now.by_label("phase_seconds_count", "phase");
        let commits_before = before.by_label("phase_seconds_count", "phase");
        let (spent, spent_before) =
            (now.by_label("phase_seconds_sum", "phase"), before.by_label("phase_seconds_sum", "phase"));
        let of = |values: &BTreeMap<&str, f64>, name: &str| values.get(name).copied().unwrap_or_default();
        let nr_commits = of(&commits, "commit") - of(&commits_before, "commit");
        let commit_time = (of(&spent, "commit") - of(&spent_before, "commit")) / nr_commits.max(1.0);
        let written: f64 = now.by_label("reclaim_written_bytes", "state").values().sum();
        let written_before: f64 = before.by_label("reclaim_written_bytes", "state").values().sum();
        let mut lines = vec![
            format!("unallocated      {}", size(now.value("space_unallocated_bytes"))),
            format!("written back     {}/s", size(((written - written_before) / seconds).max(0.0))),
            format!(
                "tree blocks      {} cached, {:.1}% hits, {misses:.0} reads/s",
                size(now.value("node_cache_bytes")),
                100.0 * share(hits, hits + misses)
            ),
            format!(
                "delayed items    {}   commits {:.2}/s, {} each",
                size(now.value("delayed_item_bytes")),
                nr_commits / seconds,
                time(commit_time)
            ),
        ];
        for (name, text) in [
            ("read_only", "the filesystem is read-only"),
            ("devices_missing", "devices are missing"),
            ("devices_behind", "devices are being brought up to date"),
            ("unwritable_files", "files cannot be written"),
            ("files_with_lost_pages", "files have lost pages of memory maps"),
        ] {
            let value = now.value(name);
            if value > 0.0 {
                lines.push(format!("!  {text}: {value}"));
            }
        }
        Self { dir, bars, lines, requests: requests(before, now, seconds), jobs: now.jobs.clone() }
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let height = |lines: usize| Constraint::Length(u16::try_from(lines).unwrap_or(u16::MAX));
        let parts = [
            height(2),
            height(self.bars.len()),
            height(self.lines.len() + 1),
            Constraint::Min(3),
            height(self.jobs.len()),
        ];
        let [head, bars, lines, requests, jobs] = Layout::vertical(parts).areas(frame.area());
        let bold = Style::new().add_modifier(Modifier::BOLD);
        frame.render_widget(Paragraph::new(Line::styled(format!("ubtrfs top   {}   q ends", self.dir), bold)), head);
        for (number, (name, share, text)) in self.bars.iter().enumerate() {
            let row = ratatui::layout::Rect {
                y: bars.y.saturating_add(u16::try_from(number).unwrap_or(u16::MAX)),
                height: 1,
                ..bars
            };
            if row.y >= bars.bottom() {
                break;
            }
            let [left, right] = Layout::horizontal([Constraint::Length(17), Constraint::Min(10)]).areas(row);
            frame.render_widget(Paragraph::new(name.as_str()), left);
            frame.render_widget(Gauge::default().ratio(*share).label(text.as_str()).use_unicode(true), right);
        }
        let text: Vec<Line<'_>> = self.lines.iter().map(|line| Line::raw(line.as_str())).collect();
        frame.render_widget(Paragraph::new(text), lines);
        let rows = self.requests.iter().map(|cells| Row::new(cells.iter().map(String::as_str)));
        let widths = [Constraint::Length(17), Constraint::Length(12), Constraint::Length(12), Constraint::Length(12)];
        let table =
            Table::new(rows, widths).header(Row::new(["requests", "per second", "mean", "longest"]).style(bold));
        frame.render_widget(table, requests);
        let text: Vec<Line<'_>> = self.jobs.iter().map(|job| Line::raw(job.as_str())).collect();
        frame.render_widget(Paragraph::new(text), jobs);
    }
}

/// The kinds of requests that came in the interval, the most frequent ones first.
fn requests(before: &Reading, now: &Reading, seconds: f64) -> Vec<[String; 4]> {
    let counts = |look: &'_ Reading, name: &str| -> BTreeMap<String, f64> {
        look.by_label(name, "opcode").into_iter().map(|(opcode, value)| (opcode.to_owned(), value)).collect()
    };
    let (old, new) = (counts(before, "fuse_requests"), counts(now, "fuse_requests"));
    let (old_time, new_time) = (counts(before, "fuse_request_seconds"), counts(now, "fuse_request_seconds"));
    let longest = counts(now, "fuse_request_seconds_max");
    let of = |values: &BTreeMap<String, f64>, name: &str| values.get(name).copied().unwrap_or_default();
    let mut found: Vec<(f64, [String; 4])> = new
        .iter()
        .map(|(opcode, count)| (opcode, count - of(&old, opcode)))
        .filter(|(_, count)| *count > 0.0)
        .map(|(opcode, count)| {
            let mean = (of(&new_time, opcode) - of(&old_time, opcode)) / count;
            let rate = format!("{:.1}", count / seconds);
            (count, [opcode.clone(), rate, time(mean), time(of(&longest, opcode))])
        })
        .collect();
    found.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    found.into_iter().map(|(_, row)| row).collect()
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn look(seconds: u64, text: &str, from: Instant) -> Reading {
        Reading {
            at: from + Duration::from_secs(seconds),
            samples: parse(text),
            jobs: vec!["balance: running".to_owned()],
        }
    }

    #[test]
    fn rates_are_those_of_the_interval() {
        let from = Instant::now();
        let first = "ubtrfs_fuse_requests_total{opcode=\"read\"} 10\n\
                     ubtrfs_fuse_request_seconds_total{opcode=\"read\"} 1\n\
                     ubtrfs_fuse_requests_total{opcode=\"write\"} 5\nubtrfs_devices_missing 1\n\
                     ubtrfs_space_total_bytes{kind=\"data\"} 1000\nubtrfs_space_used_bytes{kind=\"data\"} 500\n";
        let second = first
            .replace("opcode=\"read\"} 10", "opcode=\"read\"} 30")
            .replace("opcode=\"read\"} 1\n", "opcode=\"read\"} 1.1\n");
        let view = View::of(&look(0, first, from), &look(2, &second, from), "/mnt".to_owned());
        assert_eq!(view.requests.len(), 1, "{:?}", view.requests);
        assert_eq!(view.requests[0][..3], ["read", "10.0", "5.00 ms"].map(str::to_owned));
        assert!(
            view.bars.iter().any(|(name, share, _)| name == "data" && (*share - 0.5).abs() < 1e-9),
            "{:?}",
            view.bars
        );
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let screen = terminal.backend().to_string();
        for part in ["/mnt", "read", "devices are missing: 1", "balance: running", "500.00B of 1000.00B"] {
            assert!(screen.contains(part), "{part} in {screen}");
        }
        // Any size of the screen.
        for (width, height) in [(1, 1), (10, 3), (300, 100)] {
            Terminal::new(TestBackend::new(width, height)).unwrap().draw(|frame| view.draw(frame)).unwrap();
        }
    }
}
