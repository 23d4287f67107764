//! The plot. Each workload has a group of bars. The height of a bar is the speed of its side relative to Linux's btrfs,
//! on a logarithmic scale: bars above the line are faster, bars below it slower.

use std::fmt::Write;

use super::report::{CompareReport, CompareRow};
use super::side::SideKind;
use crate::workload::Workload;

const HEIGHT: f64 = 420.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;
const LEFT: f64 = 60.0;
const BAR: f64 = 22.0;
const GAP: f64 = 26.0;

pub(super) fn plot(report: &CompareReport) -> String {
    let mut groups: Vec<(Workload, Vec<&CompareRow>)> = Vec::new();
    for row in report.rows().iter().filter(|row| row.to_linux.is_some()) {
        match groups.iter_mut().find(|(workload, _)| *workload == row.workload) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((row.workload, vec![row])),
        }
    }
    let bars: usize = groups.iter().map(|(_, rows)| rows.len()).sum();
    let width = LEFT + bars as f64 * BAR + (groups.len() + 1) as f64 * GAP;
    let ratios = groups.iter().flat_map(|(_, rows)| rows.iter().filter_map(|row| row.to_linux));
    let (low, high) = ratios.fold((0.5, 2.0), |(low, high): (f64, f64), ratio| (low.min(ratio), high.max(ratio)));
    let (low, high) = (low.log2().floor(), high.log2().ceil());
    let y = |log2: f64| TOP + (high - log2) / (high - low) * (HEIGHT - TOP - BOTTOM);

    let mut svg = String::new();
    // Writing to a string cannot fail.
    let mut line = |text: std::fmt::Arguments<'_>| {
        let _ = writeln!(svg, "{text}");
    };
    line(format_args!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0}' height='{HEIGHT:.0}' font-family='sans-serif' \
         font-size='11'>"
    ));
    line(format_args!("<rect width='100%' height='100%' fill='white'/>"));
    line(format_args!("<text x='{LEFT}' y='18' font-size='14'>Times as fast as Linux btrfs (medians)</text>"));
    let mut exponent = low;
    while exponent <= high {
        let (at, color) = (y(exponent), if exponent == 0.0 { "#000" } else { "#ccc" });
        line(format_args!("<line x1='{LEFT}' x2='{width:.0}' y1='{at:.1}' y2='{at:.1}' stroke='{color}'/>"));
        let label = exponent.exp2();
        line(format_args!("<text x='{}' y='{:.1}' text-anchor='end'>{label}</text>", LEFT - 6.0, at + 4.0));
        exponent += 1.0;
    }
    let mut x = LEFT + GAP;
    for (workload, rows) in &groups {
        let middle = x + rows.len() as f64 * BAR / 2.0;
        for row in rows {
            let ratio = row.to_linux.unwrap_or(1.0).max(1e-6);
            let (from, to) = (y(0.0), y(ratio.log2()));
            let (top, height) = (from.min(to), (from - to).abs().max(1.0));
            line(format_args!(
                "<rect x='{x:.1}' y='{top:.1}' width='{:.1}' height='{height:.1}' fill='{}'><title>{} {}: {ratio:.2}\
                 </title></rect>",
                BAR - 3.0,
                color(row.side),
                workload.name(),
                row.side.name(),
            ));
            let label_y = if ratio >= 1.0 { top - 3.0 } else { top + height + 11.0 };
            line(format_args!(
                "<text x='{:.1}' y='{label_y:.1}' font-size='9' text-anchor='middle'>{ratio:.2}</text>",
                x + (BAR - 3.0) / 2.0
            ));
            x += BAR;
        }
        line(format_args!(
            "<text x='{middle:.1}' y='{:.1}' text-anchor='middle'>{}</text>",
            HEIGHT - BOTTOM + 24.0,
            workload.name()
        ));
        x += GAP;
    }
    let mut x = LEFT;
    for side in SideKind::ALL {
        let at = HEIGHT - 16.0;
        line(format_args!("<rect x='{x}' y='{}' width='12' height='12' fill='{}'/>", at - 10.0, color(side)));
        line(format_args!("<text x='{}' y='{at}'>{}</text>", x + 16.0, side.name()));
        x += 80.0;
    }
    line(format_args!("</svg>"));
    svg
}

fn color(side: SideKind) -> &'static str {
    match side {
        SideKind::Engine => "#1b7837",
        SideKind::Mount => "#2166ac",
        SideKind::Linux => "#888888",
        SideKind::Null => "#e08214",
        SideKind::Nbd => "#762a83",
    }
}
