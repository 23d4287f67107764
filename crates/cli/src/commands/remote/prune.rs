//! `ubtrfs remote prune`.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::bail;
use serde_json::json;
use ubtrfs_remote::{KeepRules, KeepWithin, PruneDecision, SnapshotKey, StoreUsage, StoreWork};

use super::{NO_SNAPSHOTS, StoreArgs, json_of, parts, time_of};
use crate::commands::offline::text::{printable, short_time_text};
use crate::common::{format_size, print_json, print_out};

/// Remove the snapshots that no rule keeps
#[derive(clap::Args)]
#[command(
    after_help = "The rules are those of restic's forget, for the snapshots of each subvolume: a rule keeps the newest snapshot \
                  of each of the last N hours, days, weeks, months or years that have one, in UTC. A snapshot that a kept one needs \
                  stays. Parts of pushes that never ended are removed when they are older than --orphans."
)]
pub(super) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Keep the last N snapshots
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_last: u32,
    /// Keep the last snapshot of each of N hours
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_hourly: u32,
    /// Keep the last snapshot of each of N days
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_daily: u32,
    /// Keep the last snapshot of each of N weeks
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_weekly: u32,
    /// Keep the last snapshot of each of N months
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_monthly: u32,
    /// Keep the last snapshot of each of N years
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_yearly: u32,
    /// Keep the snapshots that are at most this much older than the newest one, such as 1y6m10d12h
    #[arg(long, value_name = "TIME")]
    keep_within: Option<KeepWithin>,
    /// Age in hours of parts that belong to no snapshot, after which they are removed
    #[arg(long, value_name = "HOURS", default_value_t = 24)]
    orphans: u32,
    /// Only print what would be removed
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Print only errors
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let rules = KeepRules {
        last: args.keep_last,
        hourly: args.keep_hourly,
        daily: args.keep_daily,
        weekly: args.keep_weekly,
        monthly: args.keep_monthly,
        yearly: args.keep_yearly,
        within: args.keep_within,
    };
    if rules.is_empty() {
        bail!("no rule would keep a snapshot; give at least one, such as --keep-daily 7");
    }
    let keys = args.store.reading_keys()?;
    let store = args.store.open(StoreUsage::Read)?;
    let mark = if args.dry_run { None } else { Some(store.begin(StoreWork::Prune)?) };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let plan = store.plan_prune(&keys, &rules, now.saturating_sub(i64::from(args.orphans) * 3600))?;
    if let Some(mark) = &mark {
        store.prune(mark, &plan, &keys)?;
    }
    if args.json {
        let decision = |decision: &PruneDecision| {
            let mut value = json_of(&decision.manifest);
            value["stays"] = decision.stays().into();
            value["reasons"] = decision.reasons.clone().into();
            value["needed_by"] = decision.needed_by.map(|key| key.to_string()).into();
            value
        };
        print_json(&json!({
            "snapshots": plan.decisions.iter().map(decision).collect::<Vec<_>>(),
            "orphan_parts": plan.nr_orphans(),
            "freed_bytes": plan.freed_bytes,
            "dry_run": args.dry_run,
        }))?;
    } else if !args.quiet {
        let mut text = String::new();
        let name_of = |key: SnapshotKey| {
            let found = plan.decisions.iter().find(|decision| decision.manifest.key == key);
            found.map_or_else(|| key.to_string(), |decision| printable(&decision.manifest.name))
        };
        for decision in &plan.decisions {
            let (time, name) =
                (short_time_text(time_of(decision.manifest.created)), printable(&decision.manifest.name));
            let why = match (&decision.reasons[..], decision.needed_by) {
                ([], None) => String::new(),
                ([], Some(by)) => format!("  needed by {}", name_of(by)),
                (reasons, _) => format!("  {}", reasons.join(", ")),
            };
            let verb = if decision.stays() { "keep  " } else { "remove" };
            text.push_str(&format!("{verb} {time} {name}{why}\n"));
        }
        if plan.decisions.is_empty() {
            text.push_str(&format!("{NO_SNAPSHOTS}\n"));
        }
        if plan.nr_orphans() > 0 {
            text.push_str(&format!("remove {} of pushes that did not end\n", parts(plan.nr_orphans())));
        }
        let freed = if args.dry_run { "would free" } else { "freed" };
        text.push_str(&format!("{freed} {}\n", format_size(plan.freed_bytes)));
        print_out(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}
