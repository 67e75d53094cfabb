"""The measurements of a machine's calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.cost.calibration.calibrated import fit_errors
from shardwright.cost.clusters.cluster import Cluster
from shardwright.reports.report import Paragraph, Report


@dataclass(frozen=True)
class CalibrationReport(Report):
    """Rates and times of a calibrated cluster, and the errors of the fits of kernels and collectives."""

    cluster: Cluster

    def paragraphs(self) -> list[Paragraph]:
        device = self.cluster.device
        rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {precision}" for precision, rate in device.flops_per_s.items())
        dispatch = f"{device.op_overhead_s * 1e6:.1f} µs for an operator, {device.update_overhead_s * 1e6:.1f} µs for "
        dispatch += f"the update of a parameter, {device.step_overhead_s * 1e6:.0f} µs for a step"
        rates += f", memory {device.memory_bytes_per_s / 1e9:.1f} GB/s"
        lines = [f"device: {rates}", f"dispatch: {dispatch}"]
        for kind, error in fit_errors(device).items():
            num_kernels = sum(kernel.kind == kind for kernel in device.kernels)
            lines.append(f"{kind}: {num_kernels} kernels, each {error:.0%} from what the others say")
        for line in self.cluster.collectives:
            speed = f"{1e-9 / line.s_per_byte:.2f} GB/s + {line.latency_s * 1e6:.0f} µs"
            error = "" if line.fit_error is None else f", fitted to {line.fit_error:.0%}"
            lines.append(f"{line.collective} over {line.group_size} ranks: {speed}{error}")
        return [Paragraph(self.cluster.summary(), lines)]

    def data(self) -> dict[str, Any]:
        return self.cluster.to_json()
