"""The interactive part: eigenvalues move over a stability region as the step size is moved."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from odeformer.studio.methods import has_region
from odeformer.studio.modes import Modes
from odeformer.studio.stack import Stack
from odeformer.studio.words import number
from solvers import SOLVERS, get_solver
from solvers.base import Solver
from solvers.stability import growth_factor

METHODS = ("euler", "midpoint", "kutta3", "rk4", "ssprk43", "dopri54", "ab2", "ab3", "abm2", "leapfrog",
           "backward_euler", "trapezoid", "bdf2", "radau5")
GRID = 180  # points a side from which the boundaries are drawn; what is inside is computed, not looked up
FARTHEST = 30.0  # of the view, in h λ
SAMPLES = 64  # on the unit circle, of coefficients that are polynomials in h λ of degree below 32


def polynomials(solver: Solver) -> list[list[float]]:
    """The amplification of z' = λ z as a polynomial in ζ, highest power first; its coefficients are polynomials in h λ,
    lowest power first: of a recurrence its characteristic polynomial, of a method with a tableau Q ζ - P with
    R = P / Q (Hairer & Wanner 1996, IV.3.2)."""
    characteristic = getattr(solver, "characteristic", None)
    if callable(characteristic):
        z = np.exp(-2j * np.pi * np.arange(SAMPLES) / SAMPLES)
        values = np.stack([np.broadcast_to(np.asarray(c, dtype=complex), z.shape) for c in characteristic(z)])
        return [_trimmed(row) for row in np.fft.ifft(values, axis=1).real]
    tableau = solver.tableau
    n = tableau.n_stages
    a = np.array([[*row, *[0.0] * (n - len(row))] for row in tableau.a])
    b, v, moments = np.array(tableau.b), np.ones(n), [1.0]
    for _ in range(n):
        moments.append(float(b @ v))
        v = a @ v
    q = np.eye(1, n + 1)[0] if tableau.is_explicit else np.poly(a).real
    return [_trimmed(q), _trimmed(-np.convolve(q, moments)[:n + 1])]


def _trimmed(c: np.ndarray) -> list[float]:
    """Without rounding errors and the zeros at the end."""
    c = np.where(np.abs(c) <= 1e-12 * np.abs(c).max(initial=1e-300), 0.0, c)
    return c[:1 + max(np.flatnonzero(c), default=0)].tolist()


def outline(solver: Solver, view: Sequence[float]) -> list[list[float]]:
    """Closed curves [x, y, x, y, ...] around the region within the view; a region without interior gives none."""
    from contourpy import FillType, contour_generator

    left, right, _, top = view  # which is as high as it is deep, as regions are
    x, y = np.linspace(left, right, GRID), np.linspace(0, top, GRID // 2)
    upper = np.minimum(growth_factor(solver, x + 1j * y[:, None]), 2.0)
    y, growth = np.concatenate([-y[:0:-1], y]), np.concatenate([upper[:0:-1], upper])
    filled, offsets = contour_generator(x, y, growth, fill_type=FillType.OuterOffset).filled(-1.0, 1.0)
    curves = [points[start:stop] for points, at in zip(filled, offsets, strict=True)
              for start, stop in pairwise(at)]
    return [np.round(curve, 3).ravel().tolist() for curve in curves]


def view_of(modes: Modes, h: float) -> list[float]:
    """left, right, bottom, top: around the eigenvalues at h, but for the outermost few where these are far away, and at
    least around the regions of usual methods."""
    found = torch.cat([x.eigenvalues.flatten() for x in modes.fields.values()])
    λ = h * found[~found.isnan()]
    left, right, high = map(_reach, (-λ.real, λ.real, λ.imag.abs()))
    left, right, high = (min(FARTHEST, max(least, 1.15 * x)) for least, x in ((4.5, left), (1.5, right), (3.6, high)))
    return [-left, right, -high, high]


def _reach(x: torch.Tensor) -> float:
    """The largest number, or if that is far beyond the others one that 2 % are above."""
    most, usual = float(x.max()), float(torch.quantile(x.double(), 0.98))
    return most if most < 6 * usual else usual


def data(stack: Stack, modes: Modes) -> dict[str, Any]:
    """What the script works on; eigenvalues λ, not yet times h, with eight digits."""
    own = modes.solver
    methods = [get_solver(name) for name in METHODS if name in SOLVERS]
    if own is not None and own.name not in METHODS:
        methods.insert(0, own)
    methods = [method for method in methods if has_region(method)]
    view = view_of(modes, stack.h)
    fields = [{"name": name, "depths": [float(f"{l:.6g}") for l in found.depths],
               "values": [_pairs(row) for row in found.eigenvalues]} for name, found in modes.fields.items()]
    return {"h": stack.h, "flat": modes.flat, "view": view, "fields": fields,
            "method": 0 if own is None else [method.name for method in methods].index(own.name),
            "methods": [{"name": method.name, "polynomials": polynomials(method), "outline": outline(method, view)}
                        for method in methods]}


def _pairs(λ: torch.Tensor) -> list[float]:
    """re, im, re, im, ... of what is there."""
    λ = λ.flatten()
    λ = λ[~λ.isnan()]
    return [float(f"{x:.8g}") for pair in zip(λ.real.tolist(), λ.imag.tolist(), strict=True) for x in pair]


def fragment(stack: Stack, modes: Modes, number_: int, script: bool) -> str:
    """The markup; ``script``: whether it brings the script, which one page needs once."""
    found = data(stack, modes)
    text = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    name = f"explorer-{number_}"

    def choice(key: str, words: str, options: Sequence[str], chosen: int = 0) -> str:
        items = "".join(f'<option value="{i}"{" selected" if i == chosen else ""}>{html.escape(option)}</option>'
                        for i, option in enumerate(options))
        return (f'<label for="{name}-{key}">{words}</label><select id="{name}-{key}" data-part="{key}">{items}'
                "</select>")

    layers = ["all layers", *(f"l = {number(l)}" for l in found["fields"][0]["depths"])]
    return f"""<div class="explorer ui" id="{name}">
<script type="application/json">{text}</script>
<div class="controls"><span>{choice("method", "method", [m["name"] for m in found["methods"]], found["method"])}</span>
<span>{choice("field", "field", [f["name"] for f in found["fields"]])}</span>
<span>{choice("layer", "layer", layers)}</span></div>
<div class="controls slide"><label for="{name}-h">step size h</label>
<input type="range" id="{name}-h" data-part="h" min="-5" max="5" step="0.05" value="0">
<output for="{name}-h" data-part="shown"></output><button type="button" data-part="reset">the model's h</button></div>
<div class="card"><canvas data-part="canvas" role="img" aria-label="eigenvalues times h over the region"></canvas>
</div>
<p class="count" data-part="count" role="status" aria-live="polite"></p>
</div>""" + (f"<style>{CSS}</style><script>{SCRIPT}</script>" if script else "")




CSS = """
.explorer{margin:1.2rem 0;max-width:46rem}
.controls{display:flex;flex-wrap:wrap;gap:.5rem 1.1rem;align-items:center;margin:.5rem 0;font-size:.88rem}
.controls span{display:flex;gap:.4rem;align-items:center}
.controls label{color:var(--quiet)}
.controls select,.controls input{font:inherit;color:inherit;accent-color:var(--accent);max-width:100%}
.controls select{background:var(--paper);border:1px solid var(--line);border-radius:4px;padding:.15rem .3rem}
.slide input{flex:1 1 12rem;min-width:8rem}
.slide output{min-width:9.5rem;font-variant-numeric:tabular-nums}
.explorer .card{width:100%}
.explorer canvas{display:block;width:100%;aspect-ratio:4/3}
.facts{display:grid;grid-template-columns:minmax(6.5rem,auto) 1fr;
gap:.25rem 1.2rem;font-size:.88rem;max-width:46rem}
.facts dt{color:var(--quiet)}.facts dd{margin:0}
.count{font-size:.95rem;min-height:3.1em}
@media print{.controls{display:none}}
"""

SCRIPT = r"""
(function(){
"use strict";
function polyval(c,x,y){
  var re=0,im=0,t;
  for(var i=c.length-1;i>=0;i--){t=re*x-im*y+c[i];im=re*y+im*x;re=t}
  return [re,im];
}
function over(a,b){
  var d=b[0]*b[0]+b[1]*b[1];
  return [(a[0]*b[0]+a[1]*b[1])/d,(a[1]*b[0]-a[0]*b[1])/d];
}
function times(a,b){return [a[0]*b[0]-a[1]*b[1],a[0]*b[1]+a[1]*b[0]]}
/* the largest |zeta|: by Durand and Kerner's iteration where there are several */
function growth(polynomials,x,y){
  var c=polynomials.map(function(p){return polyval(p,x,y)}),n=c.length-1;
  var top=Math.hypot(c[0][0],c[0][1]),most=0;
  c.forEach(function(v){most=Math.max(most,Math.hypot(v[0],v[1]))});
  if(top<=1e-14*most)return Infinity;
  if(n===1)return Math.hypot(c[1][0],c[1][1])/top;
  var monic=c.map(function(v){return over(v,c[0])}),bound=0,roots=[],i,j,k;
  for(i=1;i<=n;i++)bound=Math.max(bound,Math.hypot(monic[i][0],monic[i][1]));
  bound=Math.min(1+bound,1e8);
  for(i=0;i<n;i++){var angle=2*Math.PI*i/n+0.4,r=Math.min(bound,1.2);
    roots.push([r*Math.cos(angle),r*Math.sin(angle)])}
  for(k=0;k<200;k++){
    var moved=0;
    for(i=0;i<n;i++){
      var value=[1,0],below=[1,0];
      for(j=1;j<=n;j++){value=times(value,roots[i]);value=[value[0]+monic[j][0],value[1]+monic[j][1]]}
      for(j=0;j<n;j++)if(j!==i)below=times(below,[roots[i][0]-roots[j][0],roots[i][1]-roots[j][1]]);
      if(below[0]===0&&below[1]===0)below=[1e-300,0];
      var step=over(value,below);
      roots[i]=[roots[i][0]-step[0],roots[i][1]-step[1]];
      moved=Math.max(moved,Math.hypot(step[0],step[1])/(1+Math.hypot(roots[i][0],roots[i][1])));
    }
    if(moved<1e-15)break;
  }
  return roots.reduce(function(m,r){return Math.max(m,Math.hypot(r[0],r[1]))},0);
}
var ramp=[[68,1,84],[59,82,139],[33,145,140],[94,201,98],[173,205,50]];
function color(t){
  var x=t*(ramp.length-1),i=Math.min(Math.floor(x),ramp.length-2),f=x-i;
  return "rgb("+ramp[i].map(function(a,j){return Math.round(a+(ramp[i+1][j]-a)*f)}).join(",")+")";
}
function share(a,b){
  if(!b)return "none";
  var s=100*a/b;
  return (s>99&&s<100?s.toFixed(1):s>0&&s<1?s.toFixed(1):Math.round(s))+"\u00a0%";
}
function start(box){
  var data=JSON.parse(box.querySelector("script").textContent),part={};
  box.querySelectorAll("[data-part]").forEach(function(e){part[e.dataset.part]=e});
  var scale=0;
  data.fields.forEach(function(f){f.values.forEach(function(v){
    for(var i=0;i<v.length;i+=2)scale=Math.max(scale,Math.hypot(v[i],v[i+1]))})});
  function step(){return data.h*Math.pow(2,Number(part.h.value))}
  function read(h){
    var method=data.methods[Number(part.method.value)],field=data.fields[Number(part.field.value)];
    var layer=Number(part.layer.value),points=[];
    field.values.forEach(function(v,k){
      if(layer&&layer!==k+1)return;
      for(var i=0;i<v.length;i+=2){
        var x=h*v[i],y=h*v[i+1];
        points.push({x:x,y:y,layer:k,inside:growth(method.polynomials,x,y)<=1+1e-9,decays:v[i]< -data.flat*scale});
      }
    });
    return {method:method,field:field,points:points};
  }
  function draw(found){
    var canvas=part.canvas,ratio=window.devicePixelRatio||1,width=canvas.clientWidth||640,height=width*0.75;
    canvas.width=width*ratio;canvas.height=height*ratio;
    var g=canvas.getContext("2d"),v=data.view,pad=34;
    g.setTransform(ratio,0,0,ratio,0,0);
    g.fillStyle="#fff";g.fillRect(0,0,width,height);
    var unit=Math.min((width-pad-10)/(v[1]-v[0]),(height-pad-6)/(v[3]-v[2]));
    var ox=pad+(width-pad-10-unit*(v[1]-v[0]))/2,oy=6+(height-pad-6-unit*(v[3]-v[2]))/2;
    function X(x){return ox+unit*(x-v[0])}
    function Y(y){return oy+unit*(v[3]-y)}
    g.save();g.beginPath();g.rect(X(v[0]),Y(v[3]),unit*(v[1]-v[0]),unit*(v[3]-v[2]));g.clip();
    g.beginPath();
    found.method.outline.forEach(function(c){
      for(var i=0;i<c.length;i+=2)i?g.lineTo(X(c[i]),Y(c[i+1])):g.moveTo(X(c[i]),Y(c[i+1]));
      g.closePath()});
    g.fillStyle="rgba(0,114,178,.13)";g.fill("evenodd");
    g.strokeStyle="#0072B2";g.lineWidth=1.6;g.stroke();
    g.strokeStyle="#999";g.lineWidth=.7;
    g.beginPath();g.moveTo(X(v[0]),Y(0));g.lineTo(X(v[1]),Y(0));g.moveTo(X(0),Y(v[2]));g.lineTo(X(0),Y(v[3]));g.stroke();
    g.restore();
    var n=Math.max(1,found.field.depths.length-1),size=found.points.length>600?1.8:2.8,away=0;
    found.points.forEach(function(p){
      var x=Math.min(Math.max(p.x,v[0]),v[1]),y=Math.min(Math.max(p.y,v[2]),v[3]);
      if(x!==p.x||y!==p.y)away++;
      g.beginPath();g.arc(X(x),Y(y),size,0,7);
      if(p.inside){g.fillStyle=color(p.layer/n);g.fill()}
      else{g.strokeStyle=p.decays?"#b03a00":color(p.layer/n);g.lineWidth=1.1;g.stroke()}
    });
    g.strokeStyle="#555";g.lineWidth=.8;g.strokeRect(X(v[0]),Y(v[3]),unit*(v[1]-v[0]),unit*(v[3]-v[2]));
    g.fillStyle="#333";g.font="11px system-ui,sans-serif";
    var gap=[.5,1,2,5,10,20].find(function(t){return unit*t>42})||20,t;
    g.textAlign="center";g.textBaseline="top";
    for(t=Math.ceil(v[0]/gap)*gap;t<=v[1];t+=gap)g.fillText(String(t).replace("-","\u2212"),X(t),Y(v[2])+5);
    g.fillText("Re(h \u03bb)",X((v[0]+v[1])/2),Y(v[2])+19);
    g.textAlign="right";g.textBaseline="middle";
    for(t=Math.ceil(v[2]/gap)*gap;t<=v[3];t+=gap)g.fillText(String(t).replace("-","\u2212"),X(v[0])-5,Y(t));
    return away;
  }
  function update(){
    var h=step(),found=read(h),inside=0,decaying=0,damped=0;
    found.points.forEach(function(p){
      if(p.inside)inside++;
      if(p.decays){decaying++;if(p.inside)damped++}});
    var away=draw(found),shown=h<0.001?h.toExponential(2):String(Number(h.toPrecision(3)));
    part.shown.textContent="h = "+shown+" ("+Number((1/h).toPrecision(3))+(h===1?" step":" steps")+" a layer)";
    part.h.setAttribute("aria-valuetext","h = "+shown);
    part.count.textContent="At h = "+shown+", "+share(inside,found.points.length)+" of "+found.points.length+
      " eigenvalues are inside the region of "+found.method.name+"; of the "+decaying+" that decay "+
      share(damped,decaying)+". Filled: inside; rings: outside, red where a decaying mode is made to grow"+
      (away?"; "+away+" lie beyond the frame and are drawn at its edge.":".");
    part.count.dataset.inside=inside;part.count.dataset.total=found.points.length;
    part.count.dataset.damped=damped;part.count.dataset.decaying=decaying;
  }
  ["h","method","field","layer"].forEach(function(name){part[name].addEventListener("input",update)});
  part.reset.addEventListener("click",function(){part.h.value=0;update()});
  window.addEventListener("resize",function(){draw(read(step()))});
  update();
}
document.querySelectorAll(".explorer").forEach(start);
})();
"""
